"""The method library: a frozen CLIP with one seam for prompts, the prompt methods and their losses.

Data sets and runs are unknown here. Heavy modules are imported where they are used, so that `import procap` is free:

    from procap.clip import load_clip
    from procap.methods import METHODS, build_method
    from procap.text import LabelSpace
"""

__version__ = "0.1.0"
