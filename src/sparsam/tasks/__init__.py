"""Tasks: what is learned. Each file holds a task's data, model and metric."""
