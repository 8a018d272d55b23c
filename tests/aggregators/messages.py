"""Messages to try rules on: functions (rng, n, d, f) -> float64 array [n, d], of many kinds and scales."""


def normal(rng, n, d, f):
    return rng.normal(size=(n, d))


def heavy_tails(rng, n, d, f):
    return rng.standard_t(2, size=(n, d))


def offset(rng, n, d, f):
    return rng.normal(size=(n, d)) + 1e4 * rng.normal(size=d)


def coordinates_on_many_scales(rng, n, d, f):
    return rng.normal(size=(n, d)) * 10 ** rng.uniform(-2, 2, d)


def rows_on_many_scales(rng, n, d, f):
    return rng.normal(size=(n, d)) * 10 ** rng.uniform(-2, 2, (n, 1))


def tiny(rng, n, d, f):
    return 1e-15 * rng.normal(size=(n, d))


def large(rng, n, d, f):
    return 1e15 * rng.normal(size=(n, d))


def outliers(rng, n, d, f):
    x = rng.normal(size=(n, d))
    x[:f] *= 10 ** rng.uniform(0, 5)
    return x


def huge_outliers(rng, n, d, f):
    x = rng.normal(size=(n, d))
    x[:f] *= 10 ** rng.uniform(5, 36, (f, 1))
    return x


def huge_outliers_on_one_scale(rng, n, d, f):
    x = rng.normal(size=(n, d))
    x[:f] *= 10 ** rng.uniform(5, 37)
    return x


def sign_flip(rng, n, d, f):
    x = rng.normal(size=(n, d)) + 3
    x[:f] = -x[f:].mean(0) + 10 ** rng.uniform(-2, 0) * rng.normal(size=(f, d))
    return x


def alie(rng, n, d, f):
    x = rng.normal(size=(n, d))
    x[:f] = x[f:].mean(0) + 1.5 * x[f:].std(0) + 10 ** rng.uniform(-2, 0) * rng.normal(size=(f, d))
    return x


def clusters(rng, n, d, f):
    return 10 * rng.normal(size=(3, d))[rng.integers(0, 3, n)] + rng.normal(size=(n, d))


KINDS = [
    normal,
    heavy_tails,
    offset,
    coordinates_on_many_scales,
    rows_on_many_scales,
    tiny,
    large,
    outliers,
    huge_outliers,
    huge_outliers_on_one_scale,
    sign_flip,
    alie,
    clusters,
]
