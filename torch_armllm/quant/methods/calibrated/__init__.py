"""Methods that choose integers by what reaches the layers in texts for calibration."""
