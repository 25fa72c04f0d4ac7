"""dew's algorithms inside verl 0.9: verl samples, scores and trains; dew computes the advantages and the policy loss.

    python -m dew.engines.verl.main algorithm.adv_estimator=NAME trainer.v1.trainer_mode=dew_sync ...

    launch      a run as verl's overrides and command line
    data        a run's problems as verl's Parquet files, and dew's verifiers as verl's reward function
    config      verl's configuration as one of dew's algorithms, and every setting that cannot work
    main        starts verl with dew's trainer modes
    trainer     verl's trainer modes, with the old policy's entropy passed to the estimator
    estimators  the functions that verl calls: advantages, and the algorithm's loss inside verl's
    plugin      registers estimators and loss in every process of verl
    recorder    the run's folder

Only `plugin`, `trainer` and `main` import verl at module level.
"""
