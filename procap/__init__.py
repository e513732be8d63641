"""The method library: a frozen CLIP that plans change (`procap.plan`), the prompt methods, their losses.

It does not depend on data sets or runs. Heavy modules are imported on use, so that `import procap` costs nothing:

    from procap.weights.loading import load_clip
    from procap.methods import METHODS, build_method
    from procap.text import LabelSpace
"""

__version__ = "0.1.0"
