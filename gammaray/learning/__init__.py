"""What workers learn: the folder on their machine, without torch."""
