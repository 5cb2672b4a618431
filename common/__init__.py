"""The ground floor shared by all steps: model, data, communication, run directory, checkpoints, figures."""
