"""dew's algorithms in verl 0.9: verl samples, scores and trains; dew computes the advantages and the policy loss.

    python -m dew.engines.verl.main algorithm.adv_estimator=NAME trainer.v1.trainer_mode=dew_sync ...

Only `plugin`, `trainer` and `main` import verl at module level.
"""
