"""DewTrainer: GRPOTrainer with an algorithm of dew's. It calls TRL's methods and works on what they return.

sampling    TRL's                                    _generate_and_score_completions
credit      the algorithm's, once, on whole groups     "  (after TRL's own)
loss        the algorithm's                          _compute_loss
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from dew.engines.trl.config import DewConfig
from dew.engines.trl.contract import IMAGE_KEYS, require_generated, require_keys
from dew.engines.trl.credit import Credit, Rows, give_credit, judge
from dew.engines.trl.empty import never_empty
from dew.engines.trl.guide import (
    Guide,
    GuideAnswer,
    add_authors,
    check_guide,
    open_guide,
    own_prompts,
    places,
    weave,
)
from dew.engines.trl.head import exact_head, usable
from dew.engines.trl.health import row_faults, token_faults
from dew.engines.trl.loss import OWN, divisor, micro_batches, row_weights
from dew.engines.trl.metrics import entropy_sums
from dew.engines.trl.recording import gold_of
from dew.engines.trl.rewards import check_weights, checked, missing_columns, outcome_index, reward_name
from dew.engines.trl.sampling import Columns, PromptStream, Sampled, fill_batch, gather_columns
from dew.engines.trl.scoring import dropout_off, gather_rows, loss_mask, own_rows
from dew.engines.trl.tables import last_rows
from dew.engines.trl.telling import TellingTrainer
from dew.errors import ConfigError

ENTROPY_WEIGHTING = {
    "title": "GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy Entropy",
    "id": "2508.04349",
    "citation": "@article{tan2025gtpo, title = {GTPO and GRPO-S: Token and Sequence-Level Reward Shaping with Policy "
    "Entropy}, author = {Tan and others}, year = 2025, eprint = {arXiv:2508.04349}}",
}
"""For the model card."""


class DewTrainer(TellingTrainer):
    """GRPOTrainer that trains with any of dew's algorithms. Takes what GRPOTrainer takes, and a `DewConfig`."""

    _tag_names: ClassVar = ["trl", "grpo", "dew"]
    num_generations: int
    rollout_func: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: DewConfig | None = None,
        train_dataset: Any = None,
        *others: Any,
        guide: Guide | None = None,
        **settings: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            args = DewConfig(f"{Path(name).name or 'model'}-dew")
        if not isinstance(args, DewConfig):
            raise ConfigError(f"args is a {type(args).__name__}: write DewConfig, which takes the same settings.")
        rewards = reward_funcs if isinstance(reward_funcs, list) else [] if reward_funcs is None else [reward_funcs]
        if not settings.get("rollout_func") and not settings.get("environment_factory"):
            problems = missing_columns(train_dataset, rewards)
            if problems:
                raise ConfigError("\n".join(f"- {problem}" for problem in problems))
        if not settings.get("environment_factory"):  # else an environment may bring the reward
            outcome_index([reward_name(reward) for reward in rewards], args.outcome_reward)
        self.algorithm = args.build_algorithm()
        self._name = self.algorithm.name
        if self.algorithm.name in ("gtpo", "grpo_s"):
            self._paper = ENTROPY_WEIGHTING
        bounded = [checked(reward, args.reward_timeout) for reward in rewards]
        super().__init__(model, bounded, args, train_dataset, *others, **settings)
        if self.rollout_func is not None:
            self.rollout_func = never_empty(self.rollout_func, self.eos_token_ids[0])
        self._outcome = outcome_index(self.reward_func_names, args.outcome_reward)
        check_weights(self.reward_func_names, args.reward_weights, self._outcome)

        if hasattr(self, "generation_config"):  # a policy with a NaN samples noise, and the step is skipped
            self.generation_config.remove_invalid_values = True
        self._exact_head = args.exact_head and usable(self.model)
        self._caught: list[tuple[Tensor, Tensor | None]] | None = None
        self._answers: Columns = {}
        self._stream = self._prompt_stream()
        if guide is None and args.guide is not None:
            guide = open_guide(args.guide, self._tokenizer, args, self.accelerator.device)
        self._guide = guide
        if guide is not None:
            uniform = self.use_vllm or self.accelerator.num_processes > 1
            check_guide(guide, args.guide_completions, train_dataset if uniform else None, bool(self.tools))

    # ── sampling ────────────────────────────────────────────────────────────────────────────────────────────

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.model.training:
            self._health.begin()
        if self._stream is not None and self.model.training:
            sampled = self._fill_batch(self._stream)
        else:
            sampled = self._sample(inputs)
        with self._clock.phase("credit"):
            rows = self._rows(sampled.shared)
            credit = give_credit(self.algorithm, rows)
            batch = self._with_credit(sampled, rows, credit)
        self._tell(sampled, rows, credit)
        return batch

    def _sample(self, inputs: list[dict[str, Any]]) -> Sampled:
        """One round: TRL samples and judges; what the policy thought of its tokens is kept."""
        others = self._clock["generation"] + self._clock["reward"]
        told = self._metrics[self._mode]["reward"]
        told_before = len(told)
        self._caught, self._answers = [], {}
        with self._clock.phase("scoring"):
            batch = super()._generate_and_score_completions(inputs)
            require_keys(batch)
            del told[told_before:]  # dew tells its own, without a guide's answers
            if self._guide is not None and self.model.training:
                add_authors(batch, self._authors)
            entropy, logp = self._old_entropy(batch)
        self._clock.move("scoring", "others", self._clock["generation"] + self._clock["reward"] - others)
        faults = gather_rows(self.accelerator, row_faults(logp, entropy, loss_mask(batch)))
        shared = self._shared(batch, entropy)
        shared["table"] = last_rows(self._logs, len(shared["group"]))
        if self.model.training:
            prompts = [row.get(("prompt",)) for row in shared["table"]]
            self._health.look(faults, self._unsound, self.reward_func_names, prompts)
        if self._recording():
            texts = gather_object([gold_of(row) or "" for row in inputs])
            shared["gold"] = [text or None for text in texts]
            if logp is not None:
                shared["logp"] = gather_rows(self.accelerator, logp)
        facts = {key: shared[key] for key in ("outcome", "extra", "parts", "length", "truncated", "guided")}
        groups = len(shared["group"]) // self._group_size
        signal = int(self._signal(shared).sum()) // self._group_size
        counts = {"sampled": groups, "kept": groups, "dropped": 0, "refilled": 0, "rounds": 1, "mixed": signal}
        return Sampled(local=batch, shared=shared, answers=[facts], groups=counts)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        authors: list[GuideAnswer | None] = [None] * len(prompts)
        with self._clock.phase("generation"), dropout_off(self.model):
            if self._guide is None or not self.model.training:
                generated = super()._generate(prompts)
                require_generated(generated)
            else:
                generated, authors = self._generate_with_guide(self._guide, prompts)
        completions, tool_mask = generated[1], generated[2]
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        device = self.accelerator.device
        lengths = [len(ids) for ids in completions]
        self._answers = {
            "tokens": torch.tensor(lengths, device=device),
            "length": torch.tensor(lengths if tool_mask is None else [sum(m) for m in tool_mask], device=device),
            "truncated": torch.tensor([not ids or ids[-1] not in ends for ids in completions], device=device),
            "guided": torch.tensor([answer is not None for answer in authors], device=device),
        }
        self._authors = authors
        return generated

    def _generate_with_guide(self, guide: Guide, prompts: list[Any]) -> tuple[tuple[Any, ...], Any]:
        """The guide's answers take the last places of each group; the policy samples the others."""
        size = self.num_generations
        guided = places(guide, prompts, size, self.args.guide_completions)
        self.num_generations = 1  # vLLM must not take every `size`-th prompt for a group: groups are ragged now
        try:
            generated = super()._generate(own_prompts(prompts, size, guided))
        finally:
            self.num_generations = size
        require_generated(generated)
        return weave(generated, guide, prompts, size, guided, self.state.global_step, self._tokenizer)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._clock.phase("reward"):
            found: Tensor = super()._calculate_rewards(*args, **kwargs)
        models = torch.tensor([isinstance(f, torch.nn.Module) for f in self.reward_funcs], device=found.device)
        self._unsound = found.isinf() | (found.isnan() & models)  # a model's NaN is never "cannot judge"
        self._parts = found.masked_fill(self._unsound, torch.nan)
        return self._parts

    # ── what the policy thinks of tokens ────────────────────────────────────────────────────────────────────

    def logprobs_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Any]:
        """The one place where the head is computed: (B, T) log-probabilities and entropies, and the router's loss."""
        with exact_head() if self._exact_head else nullcontext():
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        if torch.is_grad_enabled():
            return self.logprobs_and_entropies(model, *args, **kwargs)
        if model is self.model and self._caught is not None:
            kwargs["compute_entropy"] = True  # the head has it already; TRL throws it away
        with dropout_off(model):
            logp, entropy, aux = self.logprobs_and_entropies(model, *args, **kwargs)
        if self._caught is not None:
            self._caught.append((logp, entropy))
        return logp, entropy, aux

    def _score(self, model: Any, batch: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Tensor, Any]:
        """A pass over prompts and completions of a batch."""
        images = {key: batch[key] for key in IMAGE_KEYS if batch.get(key) is not None}
        logp, entropy, aux = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            compute_entropy=True,
            **images,
            **kwargs,
        )
        assert entropy is not None
        return logp, entropy, aux

    def _old_entropy(self, batch: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Entropy and log-probability under the policy that sampled: out of TRL's pass if it made one, else of ours."""
        caught, self._caught = self._caught or [], None
        old = batch.get("old_per_token_logps")
        for logp, entropy in caught:
            if logp is old:
                return entropy, logp
        if self.algorithm.needs_entropy != "old" and not self._recording():
            return None, None
        args = self.args
        rows = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with torch.no_grad():
            logp, entropy, _ = self._score(self.model, batch, batch_size=rows)
        return entropy, logp

    # ── credit ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _shared(self, batch: dict[str, Any], entropy: Tensor | None) -> Columns:
        """What credit needs to know of the rows of all processes: groups may span them."""
        accelerator, parts = self.accelerator, self._parts
        weights = self.reward_weights.to(parts.device)
        outcome = parts[:, self._outcome]
        shared = {
            "group": torch.arange(len(parts), device=parts.device) // self._group_size,
            "mask": gather_rows(accelerator, loss_mask(batch)),
            "outcome": outcome,
            "extra": (parts * weights).nansum(1) - outcome.nan_to_num(),
            "parts": parts,
            "filler": torch.zeros(len(parts), dtype=torch.bool, device=parts.device),
            **gather_columns(accelerator, self._answers, {}),
        }
        if entropy is not None:
            shared["entropy"] = gather_rows(accelerator, entropy.float().nan_to_num(0, 0, 0))
        return shared

    @staticmethod
    def _rows(shared: Columns) -> Rows:
        return Rows(
            group=shared["group"],
            mask=shared["mask"],
            outcome=shared["outcome"],
            extra=shared["extra"],
            entropy=shared.get("entropy"),
            guided=shared["guided"],
        )

    def _signal(self, shared: Columns) -> Tensor:
        return judge(self.algorithm, self._rows(shared)).signal

    def _with_credit(self, sampled: Sampled, rows: Rows, credit: Credit) -> dict[str, Any]:
        """TRL's batch with our advantages, and what the loss needs besides."""
        batch, filler = dict(sampled.local), sampled.shared["filler"]
        accelerator, length = self.accelerator, batch["completion_ids"].size(1)
        verdict = torch.where(credit.scored, credit.correct.long(), -1)
        divided = divisor(self.algorithm, rows, credit, filler)
        batch["advantages"] = own_rows(accelerator, credit.advantages, length)
        batch["verdict"] = own_rows(accelerator, verdict)
        batch["num_items_in_batch"] = rows.mask.sum()
        batch["divisor"] = torch.tensor(divided, device=rows.mask.device)
        if "author" in batch:
            weights = row_weights(
                self.algorithm,
                rows,
                credit,
                filler,
                guided=self.args.guide_weight,
                failed=self.args.guide_failed_weight,
            )
            batch["row_weight"] = own_rows(accelerator, weights)
        return batch

    # ── dynamic sampling ────────────────────────────────────────────────────────────────────────────────────

    def _prompt_stream(self) -> PromptStream | None:
        if not self.algorithm.dynamic_sampling:
            return None
        dataset = self.train_dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                "dynamic sampling draws further prompts, which a streamed data set cannot give in a repeatable order. "
                "Load it whole, or write algorithm_kwargs={'dynamic_sampling': False}."
            )
        if {"image", "images"} & set(getattr(dataset, "column_names", None) or []):
            raise ConfigError(
                "dynamic sampling cannot put together batches with images. Write "
                "algorithm_kwargs={'dynamic_sampling': False}."
            )
        return PromptStream(len(dataset), self.args.seed, bool(self.shuffle_dataset))

    def _fill_batch(self, stream: PromptStream) -> Sampled:
        size, pad = self.num_generations, self._tokenizer.pad_token_id
        dataset = self.train_dataset

        def sample(prompts: list[int]) -> Sampled:
            rows = [dataset[i] for i in prompts for _ in range(size)]
            local = len(rows) // self.accelerator.num_processes
            begin = self.accelerator.process_index * local
            return self._sample([dict(row) for row in rows[begin : begin + local]])

        return fill_batch(
            sample,
            self._signal,
            stream,
            self.accelerator,
            quota=self.args.generation_batch_size // size,
            size=size,
            max_rounds=self.algorithm.max_rounds,
            oversample=self.algorithm.oversample,
            fills={"prompt_ids": pad, "completion_ids": pad, "tool_mask": 1, "importance_sampling_ratio": 1},
        )

    # ── loss ────────────────────────────────────────────────────────────────────────────────────────────────

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        logp, entropy, aux = self._score(model, inputs, compute_aux_loss=self.aux_loss_enabled)
        # `divisor` is that of the generation; an optimizer step takes its share of it, and DDP averages over processes.
        steps = self.current_gradient_accumulation_steps if self.model.training else 1
        share = steps / self.args.steps_per_generation if self.model.training else 1.0
        count = inputs["divisor"] * share / self.accelerator.num_processes
        loss = torch.zeros((), device=logp.device)
        for name, (part_logp, part) in micro_batches(inputs, logp, entropy).items():
            term, stats = self.algorithm.loss(part_logp, part, inputs["advantages"], count=count)
            loss = loss + term
            self._statistics.add({name + stat: value for stat, value in stats.items()}, part.mask.sum())
        self._note(loss, inputs, logp, entropy)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux / steps
        return loss

    def _note(self, loss: Tensor, inputs: Columns, logp: Tensor, entropy: Tensor) -> None:
        mask, author = loss_mask(inputs), inputs.get("author")
        own = torch.ones(len(mask), dtype=torch.bool, device=mask.device) if author is None else author == OWN
        for name, (total, count) in entropy_sums(entropy, mask, inputs["verdict"], own).items():
            self._statistics.add_sum(name, total, count)
        self._statistics.add_part("loss", loss)
        for place, count in token_faults(logp, entropy, mask).items():
            self._statistics.add_sum(f"faults/{place}", count, torch.ones_like(count))
        if not self.model.training:
            self._put(self._statistics.read(self.accelerator))
