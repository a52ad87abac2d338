"""Every change to DeepSpeed or transformers at run time, one file for each upstream module; see :mod:`.registry`."""
