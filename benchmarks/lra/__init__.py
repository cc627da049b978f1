"""Long Range Arena: five tasks, every family and softmax attention, quality beside cost."""
