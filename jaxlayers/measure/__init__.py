"""Published experiments on a trained model, each a command."""
