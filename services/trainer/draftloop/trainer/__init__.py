"""The trainer: a Ray actor that learns from captured records and makes candidates."""
