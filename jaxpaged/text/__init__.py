"""Between text and token ids: tokenizers, detokenizer, stop strings, chat templates. No jax."""
