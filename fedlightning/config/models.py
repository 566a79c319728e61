"""The settings of a run, with the values each may take and the defaults of the paper."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_SEED = 2**32 - 1
"""NumPy's legacy generator, which shuffles the rows, takes no larger seed."""


class Settings(BaseModel):
    """What all configuration models share: immutable, strict about types, and closed to unknown keys.

    Every number is bounded on both sides, which refuses infinity and not-a-number too.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class XgbConfig(Settings):
    """XGBoost's parameters; the defaults are the paper's fixed values."""

    max_depth: int = Field(default=8, ge=1, le=30)
    learning_rate: float = Field(default=0.1, gt=0, le=1)
    subsample: float = Field(default=0.8, gt=0, le=1)
    colsample_bytree: float = Field(default=1.0, gt=0, le=1)
    colsample_bylevel: float = Field(default=1.0, gt=0, le=1)
    colsample_bynode: float = Field(default=1.0, gt=0, le=1)
    alpha: float = Field(default=5.0, ge=0, le=1e9)
    gamma: float = Field(default=5.0, ge=0, le=1e9)
    num_parallel_tree: int = Field(
        default=1,
        ge=1,
        le=1,
        description="an ensemble has one tree per boosting step, which the network counts on",
    )
    min_child_weight: float = Field(default=1.0, ge=0, le=1e9)
    lambda_: float = Field(default=1.0, ge=0, le=1e9, validation_alias="lambda", serialization_alias="lambda")
    """Called `lambda` in files and on the command line; Python keeps that word for itself."""


class CnnConfig(Settings):
    """The combiner network and how it is trained."""

    lr: float = Field(gt=0, le=10)
    """Adam's step size."""
    batch_size: int = Field(default=32, ge=1, le=65_536)
    channels: int = Field(default=64, ge=1, le=4_096)


class ClientsConfig(Settings):
    """The tuned numbers: what a client config file holds, in hfedxgboost's schema."""

    n_estimators_client: int = Field(ge=1, le=10_000)
    """Trees per client, T."""
    num_rounds: int = Field(ge=1, le=100_000)
    client_num: int = Field(ge=1, le=1_000)
    """Clients, K."""
    num_iterations: int = Field(ge=1, le=1_000_000)
    """Optimizer steps per client and round."""
    xgb: XgbConfig
    CNN: CnnConfig


class CentralizedConfig(Settings):
    """One XGBoost model on all rows: the parameters of the comparison."""

    n_estimators: int = Field(ge=1, le=100_000)
    xgb: XgbConfig


class DatasetConfig(Settings):
    """Which data set, and how its rows are held out."""

    name: str = Field(min_length=1, max_length=255)
    train_ratio: float = Field(default=0.75, gt=0, lt=1)
    """Share of the rows that train; the rest is the test set."""
    patience: int = Field(default=10, ge=1, le=1_000_000)
    """Rounds without a better validation score before training stops."""
    split_seed: int = Field(default=2023, ge=0, le=MAX_SEED)
    """Shuffles the rows before they are held out; the default gives the reference's test rows."""


class RunConfig(Settings):
    """Everything that decides the result of one federated run."""

    dataset: DatasetConfig
    clients: ClientsConfig
    val_ratio: float = Field(default=0.2, ge=0, lt=1)
    """Share of each client's rows that only picks the round."""
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    objective: Literal["loss", "metric"] = "loss"
    """The validation score by which the round is picked."""


class CentralizedRunConfig(CentralizedConfig):
    """Everything that decides the result of one centralized run; it has no rounds, so patience is not used."""

    dataset: DatasetConfig
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
