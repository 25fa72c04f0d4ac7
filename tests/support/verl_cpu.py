"""verl on a machine without a GPU: a platform, a process group and a rollout on the CPU. Only for tests.

Every process of a run imports this through VERL_USE_EXTERNAL_MODULES, before anything else of verl. Ray is given
simulated GPUs; FSDP2 runs on gloo; each rollout replica is an actor that samples with `transformers`.
"""

import os
from contextlib import contextmanager

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform
from verl.utils import distributed

torch.set_num_threads(1)
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # the engines that verl registers for "cuda" run on the CPU as they are


class NoDevice:
    """A stand-in for `torch.cuda`: memory is 0, everything else does nothing."""

    def mem_get_info(self, *_):
        return 0, 0

    def get_device_name(self, *_):
        return "CPU"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: 0


@PlatformRegistry.register(platform="dew_cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "nobody"
    device_module = NoDevice()

    def is_available(self):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self):
        return "GPU"  # simulated: ray_init.num_gpus

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def _nothing(self, *_, **__):
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing


set_platform(CpuPlatform())

_init_process_group = distributed.initialize_global_process_group_ray


def on_gloo(timeout_second=None, backend=None):
    """verl would ask for "cpu:gloo,cpu:gloo"."""
    return _init_process_group(timeout_second, backend or "gloo")


distributed.initialize_global_process_group_ray = on_gloo


def register_rollout():
    """After verl itself is imported: its rollouts import the whole of it."""
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[("cpu", "async")] = "verl_cpu_rollout.CpuRollout"
    replica.RolloutReplicaRegistry.register("cpu", load_replica)


def load_replica():
    from verl_cpu_rollout import CpuReplica

    return CpuReplica


def dump_batches(folder):
    """Save every recorded batch: the estimator's input and output, and the tokens."""
    from dew.engines.verl import estimators, recorder

    seen = {}
    credit_rows, record_columns = estimators.credit_rows, recorder.record_columns

    def credit_and_keep(context, rewards, mask, index):
        batch, advantages = credit_rows(context, rewards, mask, index)
        seen.update(keys=list(context.keys), index=list(index), mask=mask, rewards=rewards, advantages=advantages)
        seen.update(entropy=context.entropy, acc=context.acc, score=context.score, algorithm=context.algorithm)
        seen.update(logp=context.logp)
        return batch, advantages

    def columns_and_save(batch, data, truncated):
        number = len(os.listdir(folder))
        tokens = {name: data[name] for name in ("prompts", "prompt_mask", "responses")}
        torch.save({**seen, **tokens}, os.path.join(folder, f"batch-{number}.pt"))
        return record_columns(batch, data, truncated)

    estimators.credit_rows, recorder.record_columns = credit_and_keep, columns_and_save


register_rollout()
if os.environ.get("DEW_DUMP"):
    dump_batches(os.environ["DEW_DUMP"])
