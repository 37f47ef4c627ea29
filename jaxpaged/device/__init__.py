"""What runs on the accelerator: the jitted step and everything it is made of."""
