"""One module a model family: tiny checkpoints as transformers saves them, with every option on."""
