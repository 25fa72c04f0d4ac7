"""One torch thread per test process: two on a loaded two-core machine are up to 17 times slower."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("dew", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dew")
