"""What a training would take on a cluster: time, traffic, memory, cost. Modelled, from what was measured small."""
