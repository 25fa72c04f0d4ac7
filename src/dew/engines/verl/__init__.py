"""GTPO, GRPO-S and their peers inside verl 0.9: verl keeps its engine, dew gives it the credit.

    python -m dew.engines.verl.main algorithm.adv_estimator=gtpo trainer.v1.trainer_mode=dew_sync ...

    settings       verl's configuration read as one of dew's algorithms, with everything that cannot work
    carrying       what verl's trainer hands to an estimator: the old policy's entropy, verdicts, conversations
    conversations  several rows of one answer, laid end to end
    estimators     rows in, advantages out
    losses         the policy losses
    plugin         registers estimators and losses in every process of verl
    trainer        verl's trainer modes that carry the entropy
    recording      a run's folder
    rewards        dew's verifiers as verl's reward function
    contract       the versions of verl, and every place in it that is leaned on

Nothing here imports verl, and only `plugin`, `trainer` and `main` do at all.
"""
