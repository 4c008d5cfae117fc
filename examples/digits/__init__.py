"""1797 handwritten digits, 8 x 8 pixels with 17 shades: real pictures that need no download.

pictures      reads them
pictures.npz  the pictures and their labels, in the order in which the examples train: 1437, then 360 for validation,
              with each digit's share the same in both

They are the test set of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, 1998 (https://archive.ics.uci.edu/dataset/80), under the license CC BY 4.0. Only the order was changed.
"""
