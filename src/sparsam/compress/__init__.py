"""From a trained model to a smaller one: pruned, distilled, quantised."""
