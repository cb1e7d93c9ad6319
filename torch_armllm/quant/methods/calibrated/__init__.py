"""Methods that choose integers by the inputs of the layers on calibration texts."""
