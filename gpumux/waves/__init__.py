"""Wavelet: two waves of one training job, whose temporaries take turns in one arena. Start with `height.py`."""
