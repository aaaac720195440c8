"""The files that a run leaves on disk: state, metrics, trajectories, checkpoints, logs."""
