"""The estimators that the paper compares with, behind the same face as the library's own."""
