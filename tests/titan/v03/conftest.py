from mxtrain.titan.releases import RELEASE

# These tests are for an environment with TorchTitan 0.3.
collect_ignore_glob = [] if RELEASE == "v03" else ["test_*.py"]
