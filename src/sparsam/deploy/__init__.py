"""What a trained model becomes for those who use it: files, exports, services."""
