"""The sampler's log-probabilities against the policy's: metrics, the warning about top_p, and alarms."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

import trl_tiny as tiny
from dew.engines.trl.metrics import sampler_metrics
from dew.run.alarms import Alarms
from dew.run.folder import RunFolder


def test_golden_metrics():
    one_process = SimpleNamespace(reduce=lambda x, reduction: x)
    # ratios ½ and 2 at the two live tokens: k3 = (½ − 1 + ln 2 + 2 − 1 − ln 2) / 2 = ¼, mean ratio 1.25
    logp, nan = torch.tensor([[-2.0, -1.0, -5.0, -3.0]]), float("nan")
    sampler = logp + torch.tensor([[math.log(2), -math.log(2), 3.0, nan]])
    mask = torch.tensor([[True, True, False, True]])  # the last one has no log-probability
    found = sampler_metrics(logp, sampler, mask, one_process)
    assert found == pytest.approx({"sampler/kl": 0.25, "sampler/ratio": 1.25})
    assert sampler_metrics(logp, sampler, torch.zeros_like(mask), one_process) == {}


def rollout(keeps):
    """A sampler that returns log-probabilities. Its weights are those of the trainer `keeps` generations ago (0: the
    current ones, None: always those of the start)."""
    net, weights = tiny.model().eval(), []

    def sample(prompts, trainer):
        weights.append(copy.deepcopy(trainer.model.state_dict()))
        net.load_state_dict(weights[0 if keeps is None else max(0, len(weights) - 1 - keeps)])
        ids = trainer.processing_class(prompts)["input_ids"]
        rows, T = torch.tensor(ids), trainer.args.max_completion_length
        with torch.no_grad():
            for _ in range(T):
                rows = torch.cat([rows, torch.multinomial(net(rows).logits[:, -1].softmax(-1), 1)], 1)
            logp = net(rows).logits[:, -T - 1 : -1].log_softmax(-1).gather(-1, rows[:, -T:, None])[..., 0]
        return {"prompt_ids": ids, "completion_ids": rows[:, -T:].tolist(), "logprobs": logp.tolist()}

    return sample


def train(folder, keeps, steps, learning_rate=1e-3):
    settings = {"max_steps": steps, "learning_rate": learning_rate, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 16, "num_generations": 8, "records_every": 0}
    tiny.trainer(folder, others={"rollout_func": rollout(keeps)}, **settings).train()
    run = RunFolder(folder)
    kl = [line["sampler/kl"] for line in run.metrics() if "sampler/kl" in line]
    return kl, [alarm["alarm"] for alarm in run.alarms() if alarm["alarm"].startswith("sampler")]


def test_a_sampler_that_keeps_the_weights_of_the_start_raises_an_alarm(tmp_path):
    kl, alarms = train(tmp_path, None, 18)
    assert kl[0] < 1e-6 and kl[-1] > 10 * kl[1] > 0
    assert "sampler_mismatch" in alarms


@pytest.mark.parametrize("lag", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sampler_that_follows_raises_none(tmp_path, lag):
    steps = 18 if lag else 4
    kl, alarms = train(tmp_path, lag, steps, learning_rate=3e-4)
    assert alarms == []
    assert len(kl) == steps and (max(kl) < 1e-6) == (lag == 0)


def growing(*values):
    alarms = Alarms()
    return [a["alarm"] for step, kl in enumerate(values) for a in alarms.update(step, {"sampler/kl": kl})]


def test_the_alarm_tells_distance_from_rounding():
    """KL is about the square of the distance. Rounding does not grow."""
    start, rounding = [0.0001 * k**2 for k in range(21)], [0.002, 0.0025] * 20
    assert growing(*start) == ["sampler_mismatch"]  # the largest is 0.04, below the limit for a single step
    assert growing(*(0.001 + x for x in start)) == ["sampler_mismatch"]  # on top of rounding
    # vLLM that never got an adapter, 20 steps on an H200: 0.0002 at first, 0.009 to 0.010 over the last five, whether
    # it still grew (a learning rate that falls to 0) or not
    assert growing(*[0.0002] * 10, *[0.009] * 10) == ["sampler_mismatch"]
    assert growing(*(0.0002 + 0.041 * (k / 20 - (k / 20) ** 2 / 2) ** 2 for k in range(20))) == ["sampler_mismatch"]
    for lag in (1, 2, 3):  # steps behind: stops growing
        assert growing(*(0.0005 * min(k, lag) ** 2 for k in range(60))) == []
    assert growing(*rounding) == growing(*[0.006] * 20) == []
    assert growing(*[0.0002] * 10, 0.04, *[0.0002] * 10) == []  # one step alone
    assert growing(*[x / 100 for x in start]) == []  # has hardly moved


@pytest.mark.parametrize("given", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.2}])
def test_sampling_that_changes_vllms_log_probabilities_is_warned_about(tmp_path, given):
    more = {**given, "logprobs": 3}  # of three log-probabilities TRL takes the largest
    for args in (tiny.config(tmp_path, **given), tiny.config(tmp_path, generation_kwargs=more)):
        assert not args.warnings()
        args.use_vllm = True  # without it installed, TRL does not accept the setting
        named = ", ".join(f"{name}={value}" for name, value in (args.generation_kwargs or given).items())
        assert args.warnings()[0].what == f"{named} with vLLM:"


def test_waiting_for_a_server_is_logged(tmp_path, caplog):
    with caplog.at_level("INFO", "dew"), pytest.raises((ImportError, ConnectionError)):
        tiny.trainer(tmp_path, use_vllm=True, vllm_mode="server", vllm_server_timeout=0.5)
    assert "waiting up to 0.5 s" in caplog.text
