from mxtrain.titan.releases import RELEASE

# These tests are for an environment with TorchTitan 0.2.2.
collect_ignore_glob = [] if RELEASE == "v02" else ["test_*.py"]
