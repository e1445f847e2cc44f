"""The estimators that the paper compares with, and others of the field, behind the library's own face."""
