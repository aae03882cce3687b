"""The process that calls are made in."""

from __future__ import annotations

import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch


def new_process(threads: int) -> ProcessPoolExecutor:
    """A process for the calls: one that ends it, as a wrong address does, is a finding as any other."""
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawned, initializer=start_process, initargs=(threads,))


def start_process(threads: int) -> None:
    torch.set_num_threads(threads)
    # memory that nobody wrote is NaN, as in the tests
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("error")
