"""Transformers: the checkpoints of a ``Trainer`` in a run, saved in the background, and resumed from it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from cloudckpt.background.pending import PendingSave
from cloudckpt.checkpointer import Checkpointer
from cloudckpt.errors import InvalidStateError, NotFoundError
from cloudckpt.format.keys import step_dir
from cloudckpt.pytorch.rng import rng_state, set_rng_state
from cloudckpt.pytorch.training import TrainingState
