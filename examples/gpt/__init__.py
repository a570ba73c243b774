"""The parts of `train_gpt.py` apart from the library: model, text, processes, command line and reports."""
