"""The paper's tables as one command: train the baseline, calibrate on it, train and evaluate every row alike."""
