"""What goes over the wire between the workers of one training."""
