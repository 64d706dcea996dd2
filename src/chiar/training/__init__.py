"""Training: batches as a pure function, one loop for one process or many, checkpoints that survive `kill -9`."""
