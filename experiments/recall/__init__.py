"""Recall studies: tasks that only a memory of the whole row can solve."""
