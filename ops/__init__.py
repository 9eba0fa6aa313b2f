"""Tensors and mathematics: weight files, model families, compiled operators, sampling."""
