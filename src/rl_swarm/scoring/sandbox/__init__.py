"""Runs programs of models and strangers where they can do no harm."""
