"""Everything that `train_gpt.py` needs besides the library: model, text, processes, command line and reports."""
