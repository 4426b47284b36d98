"""Error bars of a trained network in one pass: the covariance of its outputs, and which noise it comes from."""

from .api import predict
from .prediction import Prediction, SourceShare

__all__ = ["Prediction", "SourceShare", "predict"]
