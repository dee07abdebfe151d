"""Train a ranker as a `RunConfig` says, and write a run directory: model, metrics, bias and checkpoints."""
