"""The operators of a lane on a graphics card, in torch and Triton; see `operators.py`."""
