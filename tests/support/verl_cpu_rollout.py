"""The rollout of the test harness: one actor per replica, which samples with `transformers` and is sent the weights."""

import asyncio
import os
from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput


@ray.remote(num_cpus=0)
class CpuServer:
    """Answers one request after the other. `abort_all_requests` lets none begin until `resume_generation`."""

    def __init__(self, path, limit, seed):
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.limit, self.global_steps = limit, 0
        self.open = asyncio.Event()
        self.open.set()

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        await self.open.wait()
        temperature = float(sampling_params.get("temperature", 1.0)) or 1.0
        end, most = self.model.config.eos_token_id, int(sampling_params.get("max_tokens", self.limit))
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0, "max_new_tokens": most}
        output = {"return_dict_in_generate": True, "output_logits": True}
        config = GenerationConfig(eos_token_id=end, pad_token_id=end, **sampled, **output)
        with torch.inference_mode():
            out = self.model.generate(torch.tensor([list(prompt_ids)]), generation_config=config)
        ids = out.sequences[0, len(prompt_ids) :]
        logp = (torch.cat(out.logits) / temperature).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        step = {"global_steps": self.global_steps}
        return TokenOutput(token_ids=ids.tolist(), log_probs=logp.tolist(), stop_reason="completed", extra_fields=step)

    async def load(self, weights, global_steps):
        self.model.load_state_dict(weights, strict=False)
        self.global_steps = global_steps

    async def abort_all_requests(self, reject_request=False):
        self.open.clear()

    async def resume_generation(self):
        self.open.set()

    async def wake_up(self):
        pass

    sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = wake_up

    async def start_profile(self, **_):
        pass

    stop_profile = start_profile


def server_name(rank):
    return f"cpu_server_{rank}"


class CpuReplica(RolloutReplica):
    async def launch_servers(self):
        path = self.model_config.get("local_path") or self.model_config["path"]
        server = CpuServer.options(name=server_name(self.replica_rank)).remote(
            path, self.config.response_length, self.replica_rank
        )
        self.servers = [server]
        self._server_handle, self._server_address = server, f"cpu:{self.replica_rank}"


class CpuRollout(BaseRollout):
    """The trainer's end: sends its replica the weights, as plain tensors."""

    def __init__(self, config, model_config, device_mesh, replica_rank=-1):
        super().__init__(config, model_config, device_mesh)
        self.replica_rank, self.is_leader_rank = replica_rank, True

    async def update_weights(self, weights, global_steps=None, **_):
        whole = {}
        if hasattr(weights, "__aiter__"):
            async for name, tensor in weights:
                whole[name] = tensor
        else:
            whole = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        rank = torch.distributed.get_rank() if self.replica_rank == -1 else self.replica_rank
        await ray.get_actor(server_name(rank)).load.remote(whole, global_steps)

    async def resume(self, tags):
        pass

    async def release(self):
        pass


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """Weights to rollout workers of their own, through a file: what NCCL does on a cluster."""

    def __init__(self, bucket_size, folder, is_master=False):
        self.folder, self.is_master = Path(folder), is_master

    def prepare(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        return {}

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        return {}, {}

    def init_process_group(self, **_):
        pass

    def finalize(self):
        pass

    async def send_weights(self, weights, global_steps=None):
        whole = {name: tensor.detach().cpu().clone() for name, tensor in weights}  # every process takes part
        if self.is_master:
            torch.save(whole, self.folder / "new")
            os.replace(self.folder / "new", self.folder / f"{global_steps}.pt")

    async def receive_weights(self, global_steps=None):
        path = self.folder / f"{global_steps}.pt"
        while not path.exists():
            await asyncio.sleep(0.1)
        for name, tensor in torch.load(path).items():
            yield name, tensor
