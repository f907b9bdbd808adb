"""Types that a `.skops` file may hold in addition to those that skops itself trusts.

They hold fitted state only: each is named, none is a function, and none calls one of the file's.
skops leaves out trees, since a forged one may read or crash the process that computes with it;
here that is a worker.
"""

_LOSS = "sklearn._loss"
_DISTANCES = (
    *("BrayCurtis", "Canberra", "Chebyshev", "Dice", "Euclidean", "Hamming", "Haversine"),
    *("Jaccard", "Mahalanobis", "Manhattan", "Minkowski", "RogersTanimoto", "RussellRao"),
    *("SEuclidean", "SokalSneath"),
)
_CY_LOSSES = (
    *("AbsoluteError", "ExponentialLoss", "HalfBinomialLoss", "HalfGammaLoss"),
    *("HalfMultinomialLoss", "HalfPoissonLoss", "HalfSquaredError", "HalfTweedieLoss"),
    *("HalfTweedieLossIdentity", "HuberLoss", "PinballLoss"),
)

COMPILED = (
    "sklearn.tree._tree.Tree",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    *(f"sklearn.neighbors._kd_tree.KDTree{bits}" for bits in ("", "32", "64")),
    *(f"sklearn.neighbors._ball_tree.BallTree{bits}" for bits in ("", "32", "64")),
    *(
        f"sklearn.metrics._dist_metrics.{name}Distance{bits}"
        for name in _DISTANCES
        for bits in ("", "32", "64")
    ),
    *(f"{_LOSS}._loss.Cy{name}" for name in _CY_LOSSES),
    *(f"{_LOSS}.loss.{name}" for name in ("HalfTweedieLoss", "HalfTweedieLossIdentity")),
)
"""Trees, distances and losses."""

STATE = (
    "numpy.dtype",
    "scipy.sparse._csr.csr_matrix",
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.cluster._bisect_k_means._BisectingTree",
    "sklearn.gaussian_process._gpc._BinaryGaussianProcessClassifierLaplace",
    *(
        f"sklearn.gaussian_process.kernels.{name}"
        for name in (
            *("CompoundKernel", "ConstantKernel", "DotProduct", "Exponentiation", "Matern"),
            *("ExpSineSquared", "Product", "RBF", "RationalQuadratic", "Sum", "WhiteKernel"),
        )
    ),
    "sklearn.metrics._scorer._PassthroughScorer",
    *(
        f"sklearn.model_selection._split.{name}"
        for name in ("KFold", "RepeatedKFold", "RepeatedStratifiedKFold", "StratifiedKFold")
    ),
    "sklearn.multiclass._ConstantPredictor",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.neural_network._stochastic_optimizers.SGDOptimizer",
    "sklearn.utils._bunch.Bunch",
)
"""Parts of fitted estimators that are written in Python."""

TRUSTED = frozenset((*COMPILED, *STATE))
