"""Calibrations of keys, formats of layers within a budget of bits, and the residual that goes with them."""
