"""Federated XGBoost without exchanging gradients, tuned with Optuna on PyTorch Lightning and Flower."""

__version__ = "0.1.0"
