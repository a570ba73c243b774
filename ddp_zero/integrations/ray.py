"""`report` and `resume`: sharded checkpoints in the folder of a Ray Train run, for any number of workers.

    def train(config):
        model = prepare_model(Net(), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
        opt = shard_optimizer(model, AdamW, stage=2, lr=3e-4)
        loaded = resume(model, opt)
        for step in range(0 if loaded is None else loaded.step + 1, 1000):
            ...
            report({"loss": loss.item()}, model, opt, step=step)

Workers of Ray Train are ranks like any others; the optimizer needs nothing of this module.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import train
from ray.train import Checkpoint, CheckpointUploadMode
from torch import nn
from torch.optim import Optimizer

from ddp_zero import checkpoint
from ddp_zero.checkpoint import Loaded
from ddp_zero.checkpoint.folder import complete_in, read_marker
from ddp_zero.core.comm import Agreement, Communicator


def report(metrics: Mapping[str, Any], model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> Path:
    """Save a sharded checkpoint into the folder of the run, and report it with metrics. A collective.

    Each worker writes its share in place, so nothing is copied or uploaded. Ray keeps as many checkpoints as
    `ray.train.CheckpointConfig` says.

    Args:
        metrics: for `ray.train.report`.
        model: see `ddp_zero.checkpoint.save`.
        optimizer: see `ddp_zero.checkpoint.save`.
        **options: of `ddp_zero.checkpoint.save`: ``step``, ``extra``, ``rank_extra`` and ``exclude_frozen``.

    Returns:
        The checkpoint's folder.

    Raises:
        ValueError: if the run's storage is not a file system that workers see as a folder, or as
            `ddp_zero.checkpoint.save` does.
        TypeError: for ``keep`` or ``background``.
    """
    refused = sorted({"keep", "background"} & options.keys())
    if refused:
        raise TypeError(
            f"Expected options of a checkpoint that Ray keeps and removes, got {', '.join(refused)}. Give "
            "CheckpointConfig(num_to_keep=...) to the trainer; a report is of a checkpoint that is complete. [ZERO-916]"
        )
    folder = checkpoint.save(_run_folder(), model, optimizer, **options).wait()
    is_first = train.get_context().get_world_rank() == 0
    train.report(
        dict(metrics),
        checkpoint=Checkpoint.from_directory(str(folder)) if is_first else None,
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )
    return folder


def resume(model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> Loaded | None:
    """Load the last reported checkpoint of the run, saved by any number of workers. A collective.

    Call it once, before training. Checkpoints that were saved but not reported, because a worker was lost in between,
    are removed: the run goes on from the one before.

    Args:
        model: see `ddp_zero.checkpoint.load`.
        optimizer: see `ddp_zero.checkpoint.load`.
        **options: of `ddp_zero.checkpoint.load`.

    Returns:
        Its step and other saved values; None if none was reported yet.

    Raises:
        ValueError: if the run's storage is not a file system that workers see as a folder, or as
            `ddp_zero.checkpoint.load` does.
    """
    reported = train.get_checkpoint()
    found = None if reported is None else checkpoint.load(str(reported.path), model, optimizer, **options)
    with Agreement(Communicator(None), "removing checkpoints that were not reported"):
        root = _run_folder()
        if train.get_context().get_world_rank() == 0:
            last = -1 if found is None else found.step
            for path in complete_in(root):
                if read_marker(path).step > last:
                    shutil.rmtree(path)
    return found


def _run_folder() -> Path:
    storage = train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            "Expected the run's storage_path to be a folder that all workers share, got a file system of type "
            f"{storage.storage_filesystem.type_name!r}. Mount it on every node, or gather the state on one rank by "
            "opt.state_dict() and report a file of it. [ZERO-916]"
        )
    return Path(storage.experiment_fs_path)
