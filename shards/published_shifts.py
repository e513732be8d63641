"""ImageNet's four shifts, all test only: other kinds of images of the same classes, or of 200 of them.

ProCAP's appendix lists no prompts for them: they take ImageNet's, as a model trained on ImageNet does.
"""

from __future__ import annotations

from shards.dataset import Dataset, PublicShards, RawLayout


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


# ImageNet's numbers of the classes of two sets; a label of theirs is a position in its list.
IMAGENET_A = _numbers(
    """
    6 11 13 15 17 22 23 27 30 37 39 42 47 50 57 70 71 76 79 89 90 94 96 97 99 105 107 108 110 113 124 125 130 132
    143 144 150 151 207 234 235 254 277 283 287 291 295 298 301 306 307 308 309 310 311 313 314 315 317 319 323 324
    326 327 330 334 335 336 347 361 363 372 378 386 397 400 401 402 404 407 411 416 417 420 425 428 430 437 438 445
    456 457 461 462 470 472 483 486 488 492 496 514 516 528 530 539 542 543 549 552 557 561 562 569 572 573 575 579
    589 606 607 609 614 626 627 640 641 642 643 658 668 677 682 684 687 701 704 719 736 746 749 752 758 763 765 768
    773 774 776 779 780 786 792 797 802 803 804 813 815 820 823 831 833 835 839 845 847 850 859 862 870 879 880 888
    890 897 900 907 913 924 932 933 934 937 943 945 947 951 954 956 957 959 971 972 980 981 984 986 987 988
    """
)
IMAGENET_R = _numbers(
    """
    1 2 4 6 8 9 11 13 22 23 26 29 31 39 47 63 71 76 79 84 90 94 96 97 99 100 105 107 113 122 125 130 132 144 145 147
    148 150 151 155 160 161 162 163 171 172 178 187 195 199 203 207 208 219 231 232 234 235 242 245 247 250 251 254
    259 260 263 265 267 269 276 277 281 288 289 291 292 293 296 299 301 308 309 310 311 314 315 319 323 327 330 334
    335 337 338 340 341 344 347 353 355 361 362 365 366 367 368 372 388 390 393 397 401 407 413 414 425 428 430 435
    437 441 447 448 457 462 463 469 470 471 472 476 483 487 515 546 555 558 570 579 583 587 593 594 596 609 613 617
    621 629 637 657 658 701 717 724 763 768 774 776 779 780 787 805 812 815 820 824 833 847 852 866 875 883 889 895
    907 928 931 932 933 934 936 937 943 945 947 948 949 951 953 954 957 963 965 967 980 981 983 988
    """
)

SHIFTS: tuple[Dataset, ...] = (
    Dataset(
        name="imagenetv2",
        title="ImageNetV2",
        aliases=("imagenetv2-matched-frequency",),
        classes=1000,
        counts={"test": 10_000},
        template="a photo of a {}.",
        templates=("a photo of a {}", "a close-up photo of a {}"),
        source="folder",
        licence="MIT, by https://github.com/modestyachts/ImageNetV2; the photographs are their owners'",
        description="ImageNet distribution shift: new photographs, matched in frequency",
        raw=RawLayout(
            layout="numbered-folders",
            folders=("imagenetv2", "ImageNetV2", "imagenetv2-matched-frequency-format-val"),
            images=("imagenetv2-matched-frequency-format-val", "imagenetv2-matched-frequency", "."),
            get="imagenetv2-matched-frequency.tar.gz from https://huggingface.co/datasets/vaishaal/ImageNetV2",
            classnames_digest="571ae1c583b4be7d",
            public=PublicShards("wds_imagenetv2", True, ""),
        ),
    ),
    Dataset(
        name="imagenet-sketch",
        title="ImageNet-Sketch",
        classes=1000,
        counts={"test": 50_889},
        template="a photo of a {}.",
        templates=("a photo of a {}", "a close-up photo of a {}"),
        source="folder",
        licence="MIT, by https://github.com/HaohanWang/ImageNet-Sketch; the sketches are their owners'",
        description="sketch-style ImageNet images: in black and white",
        raw=RawLayout(
            layout="wnid-folders",
            folders=("imagenet-sketch", "imagenet_sketch", "ImageNet-Sketch", "sketch"),
            images=("images", "sketch", "."),
            get="ImageNet-Sketch.zip by way of https://github.com/HaohanWang/ImageNet-Sketch",
            classnames_digest="571ae1c583b4be7d",
            public=PublicShards("wds_imagenet_sketch", True, ""),
        ),
    ),
    Dataset(
        name="imagenet-a",
        title="ImageNet-A",
        aliases=("imagenet-adversarial",),
        classes=200,
        counts={"test": 7500},
        template="a photo of a {}.",
        templates=("a photo of a {}", "a close-up photo of a {}"),
        source="folder",
        licence="MIT, by https://github.com/hendrycks/natural-adv-examples; the photographs are their owners'",
        description="natural adversarial examples: photographs that a ResNet-50 gets wrong, of 200 classes",
        raw=RawLayout(
            layout="wnid-folders",
            folders=("imagenet-adversarial", "imagenet-a", "imagenet_a"),
            images=("imagenet-a", "."),
            get="imagenet-a.tar by way of https://github.com/hendrycks/natural-adv-examples",
            classnames_digest="4b36c17b1b1bba6c",
            ignored=("README.txt",),
            indices=IMAGENET_A,
            public=PublicShards("wds_imagenet-a", True, ""),
        ),
    ),
    Dataset(
        name="imagenet-r",
        title="ImageNet-R",
        aliases=("imagenet-rendition",),
        classes=200,
        counts={"test": 30_000},
        template="a photo of a {}.",
        templates=("a photo of a {}", "a close-up photo of a {}"),
        source="folder",
        licence="see source: https://github.com/hendrycks/imagenet-r",
        description="renditions of ImageNet classes: art, toys, cartoons and the like, of 200 classes",
        raw=RawLayout(
            layout="wnid-folders",
            folders=("imagenet-rendition", "imagenet-r", "imagenet_r"),
            images=("imagenet-r", "."),
            get="imagenet-r.tar by way of https://github.com/hendrycks/imagenet-r",
            classnames_digest="79cac199a9146841",
            ignored=("README.txt",),
            indices=IMAGENET_R,
            public=PublicShards("wds_imagenet-r", True, ""),
        ),
    ),
)
