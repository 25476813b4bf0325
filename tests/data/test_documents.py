from mxtrain.data.documents import fraction, is_held_out

KEYS = [f"stdlib/module_{i}.py" for i in range(4000)]


def test_fraction_is_the_same_on_every_machine():
    # Fixed values: another hash would move documents between training and validation of published runs.
    assert fraction("stdlib/json/decoder.py", "validation") == 0.8746483661446574
    assert [key for key in KEYS[:50] if is_held_out(key, 0.05)] == [
        f"stdlib/module_{number}.py" for number in (27, 30, 33, 45, 49)
    ]


def test_fractions_are_uniform_and_independent_across_salts():
    first, second = ([fraction(key, salt) for key in KEYS] for salt in ("validation", "tokenizer"))
    for numbers in (first, second):
        assert abs(sum(numbers) / len(KEYS) - 0.5) < 0.02
    both = sum(a < 0.5 and b < 0.5 for a, b in zip(first, second, strict=True))
    assert abs(both / len(KEYS) - 0.25) < 0.03


def test_a_larger_validation_share_contains_a_smaller_one():
    small, large = ({key for key in KEYS if is_held_out(key, share)} for share in (0.1, 0.2))
    assert abs(len(small) / len(KEYS) - 0.1) < 0.02
    assert small < large
    assert not any(is_held_out(key, 0.0) for key in KEYS)
