from mxtrain.settings.model_settings import PLACES, given_in
from mxtrain.settings.read import read_settings
from mxtrain.settings.titan import own_fields


def test_every_setting_belongs_to_a_model():
    names = {name.partition(".")[2] for name in own_fields() if name.startswith("model_args.")}
    assert {name for places in PLACES.values() for name in places} == names


def test_what_is_given():
    settings = read_settings(["--model_args.dim=512", "--model_args.no-enable_weight_tying"])
    assert given_in(settings.values) == {"dim": 512, "enable_weight_tying": False}
