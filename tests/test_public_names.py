import mxtrain


def test_every_public_name_is_there():
    assert len(mxtrain.__all__) == 16
    for name in mxtrain.__all__:
        assert getattr(mxtrain, name) is not None and name in dir(mxtrain)
    assert not hasattr(mxtrain, "nothing")
